/** An answer's text with its origins, and the legend. */

import type { Origin } from "@moa-edge/runtime";

import { wholeDropped, wholeWords } from "../answers/whole_words.js";
import type { Dropped, Message } from "../chats/message.js";
import { DROPPED, ORIGINS, TENTATIVE } from "../words.js";
import { make } from "./dom.js";

/** What a tap on a word is told of it. */
export interface Piece {
  readonly text: string;
  /** Null for text that was taken back. */
  readonly origin: Origin | null;
  readonly committed: boolean;
}

/** Which text an element shows. */
export const PIECES = new WeakMap<Element, Piece>();

/** The nodes of an answer: its words by origin, and what was taken back, struck through. */
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

/** How each origin looks, in its own look. */
export function legendNodes(): Node[] {
  const named = (Object.keys(ORIGINS) as Origin[]).map((origin) => make("span", `origin ${origin}`, ORIGINS[origin]));
  return [...named, make("span", "origin drafted tentative", TENTATIVE), make("del", "", DROPPED)];
}

/** The space around it has no line. */
function piece(shown: Piece): DocumentFragment {
  const { committed, origin, text } = shown;
  const [, before, words, after] = /^(\s*)(.*?)(\s*)$/su.exec(text)!;
  const made = make("span", `origin ${origin}${committed ? "" : " tentative"}`, words!);
  PIECES.set(made, shown);
  const all = document.createDocumentFragment();
  all.append(before!, ...(words === "" ? [] : [made]), after!);
  return all;
}

function takenBack({ text }: Dropped): HTMLElement {
  const made = make("del", "", text);
  PIECES.set(made, { text, origin: null, committed: false });
  return made;
}
