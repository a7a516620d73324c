/** One message. */

import { canGoOn, type Message } from "../chats/message.js";
import { button, make } from "./dom.js";
import { originNodes } from "./origin_text.js";

/** What a message's buttons do. */
export interface MessageActions {
  again(): void;
  continueAnswer(): void;
  edit(position: number): void;
}

/** Everything but the message itself that decides how it looks. */
export interface Look {
  readonly origins: boolean;
  /** Whether it is the last one, and nothing is being written. */
  readonly offers: boolean;
  /** Whether it is the last question. */
  readonly asked: boolean;
  /** What one waits for; empty where nothing is. */
  readonly waiting: string;
}

export function messageNode(message: Message, position: number, look: Look, actions: MessageActions): HTMLLIElement {
  const who = make("span", "hidden", message.role === "user" ? "You: " : "Answer: ");
  const text = make("div", "text", who, ...textNodes(message, look.origins));
  const item = make("li", message.role, text);
  if (look.waiting !== "") item.append(make("p", "waiting", look.waiting));
  const tools = make("div", "tools", ...toolNodes(message, position, look, actions));
  if (tools.hasChildNodes()) item.append(tools);
  if (message.role === "assistant" && message.finished && message.figures.length > 0) item.append(...figures(message, tools));
  if (message.remarks !== "") item.append(make("p", "remarks", message.remarks));
  return item;
}

function textNodes(message: Message, origins: boolean): Node[] {
  if (message.role === "user") return [document.createTextNode(message.content)];
  if (origins) return originNodes(message);
  // Confirmed text is plain then; the rest is not, for it may still change.
  const certain: Message = {
    ...message,
    dropped: [],
    spans: message.spans.filter((span) => !span.committed),
  };
  const length = message.spans.reduce((sum, span) => sum + (span.committed ? span.text.length : 0), 0);
  const behind = message.content.slice(length);
  if (certain.spans.length === 0 || certain.spans.map(({ text }) => text).join("") !== behind) {
    return [document.createTextNode(message.content)];
  }
  return [document.createTextNode(message.content.slice(0, length)), ...originNodes({ ...certain, content: behind })];
}

function toolNodes(message: Message, position: number, look: Look, actions: MessageActions): Node[] {
  if (message.role === "user") {
    return look.asked ? [button("Edit", () => actions.edit(position), "Edit this question")] : [];
  }
  if (!message.finished) return [];
  const copy = button("Copy", () => void copyText(message.content, copy), "Copy the answer");
  const nodes: Node[] = navigator.clipboard === undefined ? [] : [copy]; // only secure contexts have one
  if (look.offers) nodes.push(button("Again", actions.again, "Write the answer again"));
  if (look.offers && canGoOn(message)) {
    nodes.push(button("Continue", actions.continueAnswer, "Go on with this answer, which was cut off"));
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
