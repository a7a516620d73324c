/** Run the drafting loop with a drafter, a transport and a clock. */

import type { Timing } from "./connection.js";
import type { Draft, LoopEvent } from "./drafting/events.js";
import type { DraftingLoop } from "./drafting/loop.js";
import { USUAL_CONDITIONS, type Conditions } from "./drafting/settings.js";
import { Ending } from "./ending.js";
import type { Endpoint } from "./endpoint.js";
import { ConnectError, MoaError } from "./errors.js";
import type { Host } from "./host.js";
import type { DraftTree } from "./session/tree.js";
import { Transport } from "./transport.js";

/** Faults after which connecting again would only repeat them. */
const REFUSALS: ReadonlySet<string> = new Set(["VERSION_MISMATCH", "FINGERPRINT_MISMATCH", "ROWS_MISMATCH", "REPLACED"]);
/** Resolution of clocks, by which timers may be early, in seconds. */
const CLOCK_STEP = 0.01;

const OFFLINE = "working offline";
/** Seconds for which a chat that begins waits for its first connection, before the device goes on with an answer alone. */
const FIRST_LINK_S = 1;

export interface DriverHandlers {
  /** A connection could not be made or kept; `error.final` if waiting cannot mend that. */
  problem(error: ConnectError): void;
  /** No connection will be made until the host says so: offline by choice, or in the background. */
  rest(): void;
  /** Called before each Hello, which is sent when the promise is done, or at once if undefined. It must not fail. */
  store(): Promise<void> | undefined;
}

/** A period in which connections are made. */
interface Links {
  readonly ending: Ending;
  done: Promise<void>;
  over: boolean;
}

/**
 * Do what a {@link DraftingLoop} says, one thing after the other. Between two drafts, waiting frames and actions of the
 * application are processed: they wait for one draft at most, and not at all for a drafter in a worker.
 */
export class Driver {
  /** The conditions last set by {@link tellConditions}. */
  conditions = USUAL_CONDITIONS;
  private readonly transport: Transport;
  private readonly inbox: (() => void)[] = [];
  private readonly closing = new Ending();
  private wake: (() => void) | undefined;
  private links: Links | undefined;
  private readonly leaving = new Set<Promise<void>>(); // links that are being closed
  private online: boolean | undefined; // as the user wants it; undefined before a choice
  private linkKnownBy = -Infinity; // until then it is not known whether the first connection comes
  private refused = false; // by the verifier that was connected to last
  private greeting: Promise<void> | undefined; // done when the Hello of this connection may be sent

  /** @param sessionId of the conversation, for proxies. */
  constructor(
    private readonly loop: DraftingLoop,
    private readonly endpoint: Endpoint,
    sessionId: string,
    timing: Timing,
    private readonly host: Host,
    private readonly handlers: DriverHandlers,
  ) {
    loop.listen((event) => this.hear(event));
    const transport = {
      held: (): void => this.post(() => this.rest("no connection is made in the background")),
      connecting: (): void => this.post(() => loop.connecting()),
      opened: (): void => this.post(() => this.opened()),
      frame: (data: Uint8Array): void => this.arrived(data),
      closed: (problem: ConnectError, retryInS: number | null): void => this.post(() => this.closed(problem, retryInS)),
    };
    this.transport = new Transport(endpoint, sessionId, transport, timing, host);
  }

  /** Run `action` between two things that the loop does. */
  post(action: () => void): void {
    this.inbox.push(action);
    this.wake?.();
  }

  /** Begin to connect, unless the user has chosen to be offline already. */
  begin(): void {
    if (this.online === false) return this.post(() => this.rest(OFFLINE, true));
    this.linkKnownBy = this.host.now() + FIRST_LINK_S;
    this.goOnline();
  }

  /** Begin to connect, and reconnect as long as the driver runs. */
  goOnline(): void {
    this.online = true;
    this.refused = false;
    if (!this.links || this.links.over) this.links = this.newLinks();
  }

  /** Close the connection and make no other until {@link goOnline}. */
  async goOffline(): Promise<void> {
    const wanted = this.online;
    this.online = this.refused = false;
    this.endLinks();
    if (wanted) this.post(() => this.rest(OFFLINE, true));
    await this.closedLinks();
  }

  /** Drop the connection and make another at once; no effect while offline. */
  async reconnect(why = "the network changed"): Promise<void> {
    this.transport.drop();
    if ((this.endLinks() || this.refused) && this.online) {
      this.post(() => this.loop.lost(why, 0, this.host.now()));
      this.goOnline();
    }
    await this.closedLinks();
  }

  /**
   * Set the {@link Conditions}. In the background a closed connection is made again only afterwards. If `metered` changes, a new
   * connection is made, because the Hello tells whether memory rows are wanted.
   */
  tellConditions(conditions: Conditions): void {
    this.conditions = conditions;
    this.transport.hold(conditions.background);
    this.post(() => this.takeConditions(conditions));
  }

  /** Whether the verifier refused in a way that connecting again cannot mend. */
  get gaveUp(): boolean {
    return this.refused || (this.links?.over ?? false);
  }

  /** Disconnect, and end {@link run}. */
  async close(): Promise<void> {
    await this.goOffline();
    this.closing.end();
    this.wake?.();
  }

  /** Payload bytes sent and received so far. */
  get bytesMoved(): [number, number] {
    return [this.transport.bytesUp, this.transport.bytesDown];
  }

  /**
   * Run until it is closed.
   *
   * @throws the error of a drafter, or a defect.
   */
  async run(): Promise<void> {
    while (!this.closing.ended) {
      for (let action = this.inbox.shift(); action; action = this.inbox.shift()) action();
      const now = this.host.now();
      // A draft would load the writer in vain.
      const todo = now < this.linkKnownBy ? ({ todo: "wait", until: this.linkKnownBy } as const) : this.loop.next(now);
      if (todo.todo === "draft") await this.draft(todo);
      if (this.closing.ended) return;
      this.sendFrames();
      if (todo.todo === "wait") await this.wait(todo.until);
    }
  }

  private async draft(draft: Draft): Promise<void> {
    const began = this.host.now();
    let tree: DraftTree;
    try {
      const proposed = draft.by.propose(draft.prefix, draft.budget, draft.sampling);
      if (!(await this.closing.before(Promise.resolve(proposed)))) return;
      tree = await proposed;
    } catch (error) {
      if (!this.loop.failed(draft, error instanceof MoaError ? error.message : String(error))) throw error;
      return;
    }
    const now = this.host.now();
    await this.host.turn(); // awaiting a promise alone does not let other events run
    if (!this.closing.ended) this.loop.drafted(draft, tree, now - began);
  }

  private sendFrames(): void {
    if (this.greeting) return;
    for (const frame of this.loop.framesToSend(this.host.now())) this.transport.send(frame);
  }

  private async wait(until: number | null): Promise<void> {
    if (this.inbox.length) return;
    let cancel: (() => void) | undefined;
    await new Promise<void>((resolve) => {
      this.wake = resolve;
      if (until !== null) cancel = this.host.later(Math.max(0, until - this.host.now()) + CLOCK_STEP, resolve);
    });
    this.wake = undefined;
    cancel?.();
  }

  private newLinks(): Links {
    const links: Links = { ending: new Ending(), done: Promise.resolve(), over: false };
    // After the connection before is closed: the server takes the connection that arrives last for the newest.
    links.done = this.closedLinks().then(() => this.runLinks(links));
    return links;
  }

  /** Report a defect that ends the links: otherwise the application would wait for ever. */
  private async runLinks(links: Links): Promise<void> {
    try {
      await this.transport.run(links.ending);
    } catch (error) {
      if (!links.ending.ended) this.post(() => this.closed(unexpectedError(this.endpoint.address, error), null));
    } finally {
      links.over = true;
    }
  }

  /** Begin to close the connection; return whether one was wanted. */
  private endLinks(): boolean {
    const ended = this.links;
    this.links = undefined;
    if (!ended) return false;
    ended.ending.end();
    this.leaving.add(ended.done);
    void ended.done.then(() => this.leaving.delete(ended.done));
    return true;
  }

  private async closedLinks(): Promise<void> {
    await Promise.all(this.leaving);
  }

  private takeConditions(conditions: Conditions): void {
    const another = conditions.metered !== this.loop.conditions.metered;
    this.loop.conditions = conditions;
    const why = `connecting anew: the network is ${conditions.metered ? "metered" : "no longer metered"}`;
    if (another) void this.reconnect(why);
  }

  // -- events of transport and loop ------------------------------------------------------------

  /**
   * Send the Hello; if the chat is stored, after the store has the Hello's count. The loop runs meanwhile, and sends nothing
   * before the Welcome.
   */
  private opened(): void {
    this.loop.opened();
    const stored = (this.greeting = this.handlers.store());
    void stored?.then(() => this.post(() => this.greet(stored)));
  }

  private greet(stored: Promise<void>): void {
    if (stored === this.greeting) this.greeting = undefined; // else there is another connection by now
  }

  private arrived(data: Uint8Array): void {
    const at = this.host.now(); // a draft may be under way until much later
    this.post(() => this.received(data, at));
  }

  private received(data: Uint8Array, at: number): void {
    this.loop.received(data, at);
    this.transport.processed(data);
  }

  private closed(problem: ConnectError, retryInS: number | null): void {
    this.loop.lost(problem.message, retryInS, this.host.now());
    this.handlers.problem(problem);
  }

  private rest(why: string, onPurpose = false): void {
    this.loop.lost(why, null, this.host.now(), onPurpose);
    this.handlers.rest();
  }

  private hear(event: LoopEvent): void {
    if (event.event === "LinkChanged" && event.status !== "reconnecting") this.linkKnownBy = -Infinity;
    if (event.event === "Welcomed") {
      this.transport.welcomed();
    } else if (event.event === "Faulted" && REFUSALS.has(event.code) && this.endLinks()) {
      this.refused = true;
      this.post(() => this.loop.lost(event.text, null, this.host.now()));
    }
  }
}

/** Return the error for a defect that ended the link. */
function unexpectedError(address: string, error: unknown): ConnectError {
  return new ConnectError(`the connection to ${address} failed unexpectedly: ${String(error)}`, true, { cause: error });
}
