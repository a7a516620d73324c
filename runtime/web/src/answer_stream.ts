/** The events of an answer, from the drafting loop to the application. */

import { ChatError } from "./errors.js";
import type { AnswerUpdate, ChatEvent, TokenOrigin } from "./events.js";
import { same } from "./tokens.js";

/** A reader of an answer's events, until it leaves. */
export class Follower {
  /** Whether it has left. */
  left = false;
  /** Called when it leaves. */
  onLeave: (() => void) | undefined;

  leave(): void {
    this.left = true;
    this.onLeave?.();
  }
}

/**
 * The events of an answer, for an application to iterate. Unlike that of an async generator, `return`, which leaves the answer,
 * does not wait for the next event, so a button that stops the answer can call it at any time.
 */
export class AnswerStream implements AsyncGenerator<ChatEvent, void, undefined> {
  private readonly follower = new Follower();
  private readonly events: AsyncGenerator<ChatEvent, void, undefined>;

  /** @param begin makes the generator, which ends soon after its follower has left. */
  constructor(begin: (follower: Follower) => AsyncGenerator<ChatEvent, void, undefined>) {
    this.events = begin(this.follower);
  }

  /** Return the next event. */
  next(): Promise<IteratorResult<ChatEvent, void>> {
    return this.events.next();
  }

  /** Stop following; done when the answer has stopped. */
  return(): Promise<IteratorResult<ChatEvent, void>> {
    this.follower.leave();
    return this.events.return();
  }

  throw(error: unknown): Promise<IteratorResult<ChatEvent, void>> {
    this.follower.leave();
    return this.events.throw(error);
  }

  [Symbol.asyncIterator](): this {
    return this;
  }
}

type Item = ChatEvent | ChatError | undefined;

/**
 * A queue of events with one reader.
 *
 * The reader may take back a part of the answer while events about it are still in the queue. So each event has the *edition*
 * of the answer that it is about, and the reader gets those of the edition that it asked for last.
 */
export class AnswerEvents {
  private queue: [number, Item][] = [];
  private edition = 0;
  private editionAsked = 0;
  private published: readonly TokenOrigin[] = [];
  private ended = false;
  private wake: (() => void) | undefined;

  /** Empty the queue for another answer. */
  clear(): void {
    this.queue = [];
    this.published = [];
    if (this.ended) this.end();
  }

  /** Have the reader take back a part of the answer, or all; return the edition without it. */
  askForEdition(): number {
    return ++this.editionAsked;
  }

  /** Note that the loop has taken it back. */
  beginEdition(edition: number): void {
    this.edition = edition;
    this.published = [];
  }

  /** Put an event, or an error that the reader throws. */
  put(event: Item): void {
    this.queue.push([this.edition, event]);
    this.wake?.();
  }

  /** Put an update, unless the last one had the same tokens: a draft may be empty. */
  publish(update: AnswerUpdate, evenWithoutTokens = false): void {
    if (sameTokens(update.tokens, this.published) && !(evenWithoutTokens && !update.tokens.length)) return;
    this.published = update.tokens;
    this.put(update);
  }

  /** End the events: the chat is closed. */
  end(): void {
    this.ended = true;
    this.put(undefined);
  }

  /**
   * Return the next event of the edition; `end` if there will be none, `left` if the follower has left.
   *
   * @throws ChatError an error was put.
   */
  async get(follower: Follower): Promise<ChatEvent | "end" | "left"> {
    for (;;) {
      if (follower.left) return "left";
      const next = this.queue.shift();
      if (!next) {
        await new Promise<void>((resolve) => (this.wake = follower.onLeave = resolve));
        this.wake = follower.onLeave = undefined;
        continue;
      }
      const [edition, event] = next;
      if (event instanceof ChatError) throw event;
      if (!event) return "end";
      if (edition === this.editionAsked || event.event === "LinkChanged") return event;
    }
  }
}

function sameTokens(a: readonly TokenOrigin[], b: readonly TokenOrigin[]): boolean {
  if (!same(a.map(({ token }) => token), b.map(({ token }) => token))) return false;
  return a.every(({ committed, origin }, at) => origin === b[at]!.origin && committed === b[at]!.committed);
}
