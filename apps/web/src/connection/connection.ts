/** From an address and a token to a chat of the runtime. */

import { Chat, type Bundle, type ChatStore, type Conditions, type Drafting } from "@moa-edge/runtime";
import { IndexedDbChatStore } from "@moa-edge/runtime/browser";

import type { Talk } from "../conversation/talk.js";
import { asSentence } from "../words.js";
import type { Place } from "./access.js";
import { Device } from "./device.js";

/** What the page says of a chat before it begins. */
export interface Wishes {
  readonly place: Place;
  readonly token: string;
  readonly drafting: Drafting;
  readonly conditions: Conditions;
}

export class Connection {
  readonly device: Device;
  chat: Chat | null = null;
  talk: Talk | null = null;
  bundle: Bundle | null = null;
  /** Why there is no chat, in a sentence; empty where there is one, or will be. */
  problem = "";
  private place: Place = { verifier: "", http: "", bundle: "" };

  /** @param changed something is to be drawn anew. */
  constructor(private readonly changed: () => void) {
    this.device = new Device(changed);
  }

  /** Open the bundle and begin a chat, in the place of the one before; it need not reach the verifier for that. */
  async start(wishes: Wishes): Promise<void> {
    await this.close();
    this.place = wishes.place;
    this.problem = "";
    this.changed();
    try {
      this.bundle = await this.device.open(wishes.place.bundle);
      await this.connect(wishes, this.bundle);
    } catch (error) {
      await this.close();
      this.problem = asSentence((error as Error).message);
    }
    this.changed();
  }

  /** Download what drafts and writes; returns whether it is here. It counts from the next start on. */
  async fetchModels(): Promise<boolean> {
    return this.bundle !== null && this.device.fetch(this.place.bundle, this.bundle);
  }

  /** Leave the verifier; what is being written goes on with the next page. */
  async close(): Promise<void> {
    const { chat } = this;
    this.chat = this.talk = null;
    await chat?.close();
    await this.device.close();
  }

  private async connect({ conditions, drafting, place, token }: Wishes, bundle: Bundle): Promise<void> {
    const models = await this.device.load(place.bundle, bundle);
    const { manifest } = bundle;
    const chat = await Chat.connect(
      { manifest, tokenizer: await bundle.tokenizer() },
      { url: place.verifier, token },
      { ...models?.forConversation(), policy: "ask", settings: { drafting }, ...storeOf(), wait: false },
    );
    chat.tellConditions(conditions);
    this.chat = chat;
    this.talk = { chat, target: manifest.fingerprints.target, recommended: manifest.sampling };
  }
}

/** Where an answer under way outlives the page; nowhere without the locks that only secure contexts have. */
function storeOf(): { store?: ChatStore } {
  return isSecureContext ? { store: new IndexedDbChatStore("answer") } : {};
}
