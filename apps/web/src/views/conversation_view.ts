/** The messages of the open chat. */

import type { Message } from "../chats/message.js";
import { droppedSentence, originSentence } from "../words.js";
import { byId } from "./dom.js";
import { messageNode, type Look, type MessageActions } from "./message_view.js";
import { legendNodes, PIECES } from "./origin_text.js";

const NEAR_PX = 80; // so close to the end one reads along

interface Row {
  message: Message;
  look: string;
  node: HTMLLIElement;
}

export class ConversationView {
  private readonly list = byId("messages");
  private readonly scroll = byId("scroll");
  private readonly empty = byId("empty");
  private readonly legend = byId("legend");
  private rows: Row[] = [];

  /** @param tell says where a word comes from that was tapped. */
  constructor(
    private readonly actions: MessageActions,
    tell: (sentence: string) => void,
  ) {
    this.legend.append(...legendNodes());
    this.list.addEventListener("click", (event) => {
      const piece = PIECES.get(event.target as Element);
      if (piece === undefined || String(getSelection()) !== "") return;
      const { committed, origin, text } = piece;
      tell(origin === null ? droppedSentence(text) : originSentence(origin, committed));
    });
  }

  /** Draw what has changed. @param waiting what the answer waits for, which is the last message. */
  show(messages: readonly Message[], busy: boolean, waiting: string, origins: boolean): void {
    const near = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < NEAR_PX;
    const asked = messages.map(({ role }) => role).lastIndexOf("user");
    const rows = messages.map((message, position): Row => {
      const last = position === messages.length - 1;
      const look: Look = {
        origins,
        offers: last && !busy,
        asked: position === asked && !busy,
        waiting: last && message.role === "assistant" && !message.finished ? waiting : "",
      };
      const key = JSON.stringify(look);
      const before = this.rows[position];
      if (before !== undefined && sameMessage(before.message, message) && before.look === key) return before;
      const node = messageNode(message, position, look, this.actions);
      if (before === undefined) this.list.append(node);
      else before.node.replaceWith(node);
      return { message, look: key, node };
    });
    for (const { node } of this.rows.slice(rows.length)) node.remove();
    this.rows = rows;
    this.empty.hidden = rows.length > 0;
    this.legend.hidden = !origins || !messages.some(({ role }) => role === "assistant");
    if (near) this.toEnd();
  }

  /** Scroll to where the answer grows. */
  toEnd(): void {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

/** Questions are made anew while an answer is written. */
function sameMessage(one: Message, other: Message): boolean {
  return one === other || (one.role === "user" && other.role === "user" && one.content === other.content);
}
