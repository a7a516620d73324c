/** The events of an answer, as an application iterates them. */

import type { ChatEvent } from "./events.js";

/** A reader of an answer's events, until it leaves. */
export class Follower {
  /** Whether it has left. */
  left = false;
  /** Called when it leaves. */
  onLeave: (() => void) | undefined;

  /** @param stop leaves, and is done when the answer has stopped. */
  constructor(readonly stop: () => Promise<unknown>) {}

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
  private readonly follower = new Follower(() => this.return());
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
