/** Who is told what happens in the drafting loop, and how the link stands. */

import type { LinkChanged, LoopEvent } from "./events.js";

export type Listener = (event: LoopEvent) => void;

/** Told at once, in the order in which they came. */
export class Listeners {
  /** Its last change. */
  link: LinkChanged = { event: "LinkChanged", status: "offline", detail: "", retryInS: null };
  private readonly all: Listener[] = [];

  /** Have it called with each event. */
  add(listener: Listener): void {
    this.all.push(listener);
  }

  /** Something happened. */
  tell(...events: LoopEvent[]): void {
    for (const event of events) for (const listener of this.all) listener(event);
  }

  /** The link stands so; told where that is news. */
  setLink(status: LinkChanged["status"], detail = "", retryInS: number | null = null): void {
    const { link } = this;
    if (link.status === status && link.detail === detail && link.retryInS === retryInS) return;
    this.link = { event: "LinkChanged", status, detail, retryInS };
    this.tell(this.link);
  }
}
