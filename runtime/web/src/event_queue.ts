/** The queue of events between the drafting loop and the application. */

import type { Follower } from "./answer_stream.js";
import { ChatError } from "./errors.js";
import type { AnswerUpdate, ChatEvent, TokenOrigin } from "./events.js";
import { same } from "./tokens.js";

type Item = ChatEvent | ChatError | undefined;

/**
 * A queue of events with one reader.
 *
 * The reader may take back a part of the answer while events about it are still in the queue. So each event has the *edition*
 * of the answer that it is about, and the reader gets those of the edition that it asked for last.
 */
export class EventQueue {
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

  /** Put a first update of the answer, unless the last one had the same tokens: a draft may be empty. */
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
