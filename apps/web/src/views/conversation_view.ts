/** The messages of the open chat: their text with its origins, and their buttons. */

import type { Origin } from "@moa-edge/runtime";

import { canGoOn, parted, type Dropped, type Message } from "../message.js";
import { DROPPED, ORIGINS, REASONING, TENTATIVE, droppedSentence, originSentence } from "../strings.js";
import { wholeDropped, wholeWords } from "../whole_words.js";
import { button, byId, make } from "./dom.js";
import { markdownNodes } from "./markdown.js";

const NEAR_PX = 80; // this close to the end, the view follows the answer
const SHOWN_WORDS = 12; // of text that was taken back; a tap tells all of it

interface Row {
  message: Message;
  look: string;
  node: HTMLLIElement;
}

/** The list of messages. */
export class ConversationView {
  private readonly list = byId("messages");
  private readonly scroll = byId("scroll");
  private readonly empty = byId("empty");
  private readonly legend = byId("legend");
  private rows: Row[] = [];

  /** @param tell shows the origin of a word that was tapped. */
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

  /** Draw the changes. @param waiting why the last message, an answer, does not go on. */
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
      if (before?.node.querySelector("details")?.open) node.querySelector("details")?.setAttribute("open", "");
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

  /** Scroll to the end. */
  toEnd(): void {
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

/** Return whether a message is unchanged. Questions are new objects while an answer is written. */
function sameMessage(one: Message, other: Message): boolean {
  return one === other || (one.role === "user" && other.role === "user" && one.content === other.content);
}

/** Actions of a message's buttons. */
export interface MessageActions {
  again(): void;
  continueAnswer(): void;
  edit(position: number): void;
}

/** State that decides how a message is drawn, besides the message. */
export interface Look {
  readonly origins: boolean;
  /** Whether it is the last one, and no answer is being written. */
  readonly offers: boolean;
  /** Whether it is the last question. */
  readonly asked: boolean;
  /** Why the answer does not go on; empty while it does. */
  readonly waiting: string;
}

/** Return the element of a message. */
export function messageNode(message: Message, position: number, look: Look, actions: MessageActions): HTMLLIElement {
  const who = make("span", "hidden", message.role === "user" ? "You: " : "Answer: ");
  const { answer, reasoning } = parted(message);
  const plain = message.role === "user" || look.origins;
  const text = make("div", plain ? "text" : "text markdown", who);
  if (reasoning !== null) {
    text.append(make("details", "reasoning", make("summary", "", REASONING), ...textNodes(reasoning, look.origins)));
  }
  text.append(...textNodes(answer, look.origins));
  const item = make("li", message.role, text);
  if (look.waiting !== "") item.append(make("p", "waiting", look.waiting));
  const tools = make("div", "tools", ...toolNodes(message, position, look, actions));
  if (tools.hasChildNodes()) item.append(tools);
  if (message.role === "assistant" && message.finished && message.figures.length > 0) item.append(...figures(message, tools));
  if (message.remarks !== "") item.append(make("p", "remarks", message.remarks));
  return item;
}

/** Return the nodes of a text: with origins as it was written; without, as Markdown, in which only unconfirmed text is marked. */
function textNodes(message: Message, origins: boolean): Node[] {
  if (message.role === "user") return [document.createTextNode(message.content)];
  if (origins) return originNodes(message);
  const certain = message.spans.reduce((sum, span) => sum + (span.committed ? span.text.length : 0), 0);
  const from = message.spans.length > 0 ? certain : message.content.length;
  const origin = message.spans.find((span) => !span.committed)?.origin ?? "drafted";
  return markdownNodes(message.content, from, (text) => piece({ text, origin, committed: false }));
}

function toolNodes(message: Message, position: number, look: Look, actions: MessageActions): Node[] {
  if (message.role === "user") {
    return look.asked ? [button("Edit", () => actions.edit(position), "Edit this question")] : [];
  }
  if (!message.finished) return [];
  const copy = button("Copy", () => void copyText(parted(message).answer.content, copy), "Copy the answer");
  const nodes: Node[] = navigator.clipboard === undefined ? [] : [copy]; // only secure contexts have one
  if (look.offers) nodes.push(button("Again", actions.again, "Write the answer again"));
  if (look.offers && canGoOn(message)) {
    nodes.push(button("Continue", actions.continueAnswer, "Continue this answer, which was cut off"));
  }
  return nodes;
}

function figures(message: Message, tools: HTMLElement): Node[] {
  const list = make("ul", "figures", ...message.figures.map((text) => make("li", "", text)));
  list.hidden = true;
  const toggle = button("Figures", () => {
    list.hidden = !list.hidden;
    toggle.setAttribute("aria-expanded", String(!list.hidden));
    list.scrollIntoView({ block: "nearest" });
  });
  toggle.setAttribute("aria-expanded", "false");
  tools.append(toggle);
  return [list];
}

async function copyText(text: string, from: HTMLButtonElement): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
    from.textContent = "Copied";
  } catch {
    from.textContent = "Not allowed";
  }
}

/** A word's text and origin, shown after a tap. */
export interface Piece {
  readonly text: string;
  /** Null for text that was taken back. */
  readonly origin: Origin | null;
  readonly committed: boolean;
}

/** The piece that an element shows. */
export const PIECES = new WeakMap<Element, Piece>();

/** Return the nodes of an answer: its words by origin, and text that was taken back, struck through. */
export function originNodes(message: Message): Node[] {
  const spans = wholeWords(message.spans);
  const dropped = wholeDropped(message.dropped, message.content).sort((a, b) => a.offset - b.offset);
  if (spans.length === 0) return [document.createTextNode(message.content)];
  const nodes: Node[] = [];
  let at = 0;
  for (const { text, origin, committed } of spans) {
    let from = 0;
    while (dropped.length > 0 && dropped[0]!.offset < at + text.length) {
      const one = dropped.shift()!;
      const until = Math.max(from, one.offset - at);
      if (until > from) nodes.push(piece({ text: text.slice(from, until), origin, committed }));
      nodes.push(takenBack(one));
      from = until;
    }
    nodes.push(piece({ text: text.slice(from), origin, committed }));
    at += text.length;
  }
  return [...nodes, ...dropped.map(takenBack)];
}

/** Return the legend: each origin in its own style. */
export function legendNodes(): Node[] {
  const named = (Object.keys(ORIGINS) as Origin[]).map((origin) => make("span", `origin ${origin}`, ORIGINS[origin]));
  return [...named, make("span", "origin drafted tentative", TENTATIVE), make("del", "", DROPPED)];
}

/** Return a piece's nodes; the white space around it is not underlined. */
function piece(shown: Piece): DocumentFragment {
  const { committed, origin, text } = shown;
  const [, before, words, after] = /^(\s*)(.*?)(\s*)$/su.exec(text)!;
  const made = make("span", `origin ${origin}${committed ? "" : " tentative"}`, words!);
  PIECES.set(made, shown);
  const all = document.createDocumentFragment();
  all.append(before!, ...(words === "" ? [] : [made]), after!);
  return all;
}

/** Return text that was taken back, shortened to its first words: a whole outage's text would hide the answer. */
function takenBack({ text }: Dropped): HTMLElement {
  const words = text.split(/(?<=\S)(?=\s)/u);
  const rest = words.length - SHOWN_WORDS;
  const made = make("del", "", rest > 0 ? `${words.slice(0, SHOWN_WORDS).join("")}… (${rest} more)` : text);
  PIECES.set(made, { text, origin: null, committed: false });
  return made;
}
