/** An answer's events as an application follows them. */

import type { ChatEvent } from "../events.js";

/** Who follows an answer, until he leaves it. */
export class Follower {
  /** Whether he has left. */
  left = false;
  /** Called when he does. */
  onLeave: (() => void) | undefined;

  leave(): void {
    this.left = true;
    this.onLeave?.();
  }
}

/**
 * What an async generator is, but that `return`, which leaves the answer, need not wait for the next event. So a button that
 * stops an answer calls it, whatever the loop that follows the answer waits for.
 */
export class AnswerStream implements AsyncGenerator<ChatEvent, void, undefined> {
  private readonly follower = new Follower();
  private readonly events: AsyncGenerator<ChatEvent, void, undefined>;

  /** @param begin makes the generator; it ends soon once its follower has left. */
  constructor(begin: (follower: Follower) => AsyncGenerator<ChatEvent, void, undefined>) {
    this.events = begin(this.follower);
  }

  /** The next event. */
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
