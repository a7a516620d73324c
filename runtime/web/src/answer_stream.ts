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

/** An answer, as an {@link AnswerStream} asks for it and reads it; it calls one function after the other. */
export interface Answer {
  /** Ask for it. */
  begin(): Promise<void>;

  /** Return the next event; undefined if there will be none. */
  next(): Promise<ChatEvent | undefined>;

  /**
   * Stop it, if it has not ended by itself. Called once, if {@link begin} was.
   *
   * @param error of the function before, if it failed.
   */
  end(error?: unknown): Promise<void>;
}

type Result = IteratorResult<ChatEvent, void>;

const END: Result = { value: undefined, done: true };

/**
 * The events of an answer, for an application to iterate. Unlike that of an async generator, `return`, which leaves the answer,
 * does not wait for the next event, so a button that stops the answer can call it at any time. It is no async generator because
 * engines without those get one that cannot be left while its next event is awaited.
 */
export class AnswerStream implements AsyncGenerator<ChatEvent, void, undefined> {
  private readonly follower = new Follower(() => this.return());
  private readonly answer: Answer;
  private state: "new" | "begun" | "ended" = "new";
  private last: Promise<unknown> = Promise.resolve(); // the call before

  /** @param begin makes the answer, which ends soon after its follower has left. */
  constructor(begin: (follower: Follower) => Answer) {
    this.answer = begin(this.follower);
  }

  /** Return the next event. */
  next(): Promise<Result> {
    return this.inTurn(async () => {
      if (this.state === "ended") return END;
      let event: ChatEvent | undefined;
      try {
        if (this.state === "new") {
          this.state = "begun";
          await this.answer.begin();
        }
        event = await this.answer.next();
      } catch (error) {
        await this.end(error);
        throw error;
      }
      return event ? { value: event, done: false } : this.end();
    });
  }

  /** Stop following; done when the answer has stopped. */
  return(): Promise<Result> {
    this.follower.leave();
    return this.inTurn(() => this.end());
  }

  throw(error: unknown): Promise<Result> {
    this.follower.leave();
    return this.inTurn(async () => {
      await this.end(error);
      throw error;
    });
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  private async end(error?: unknown): Promise<Result> {
    const { state } = this;
    this.state = "ended";
    if (state === "begun") await this.answer.end(error);
    return END;
  }

  /** Do something after all that was asked for before. */
  private inTurn(action: () => Promise<Result>): Promise<Result> {
    const done = this.last.then(action);
    this.last = done.catch(() => undefined);
    return done;
  }
}
