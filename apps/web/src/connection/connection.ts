/** From an address and a token to a chat of the runtime. */

import { Chat, StoreError, type Bundle, type ChatStore, type Drafting } from "@moa-edge/runtime";
import { followPage, IndexedDbChatStore } from "@moa-edge/runtime/browser";

import type { Talk } from "../conversation/talk.js";
import { asSentence } from "../words.js";
import type { Place } from "./access.js";
import { Device } from "./device.js";

const ELSEWHERE = "moa-edge is open in another tab: go on there, or close it there and try again.";

/** What the page says of a chat before it begins. */
export interface Wishes {
  readonly place: Place;
  readonly token: string;
  readonly drafting: Drafting;
  /** Whether the device is to have the writer too. */
  readonly writer: boolean;
  /** Whether the server may have another bundle by now than the stored one, as where it refused that. */
  readonly anew: boolean;
}

export class Connection {
  readonly device: Device;
  chat: Chat | null = null;
  talk: Talk | null = null;
  bundle: Bundle | null = null;
  /** Why there is no chat, in a sentence; empty where there is one, or will be. */
  problem = "";
  private unfollow: () => void = () => undefined;
  private place: Place = { verifier: "", http: "", bundle: "" };

  /**
   * @param savePower whether the user wants the device to compute nothing.
   * @param changed something is to be drawn anew.
   */
  constructor(
    private readonly savePower: () => boolean,
    private readonly changed: () => void,
  ) {
    this.device = new Device(changed);
  }

  /** Open the bundle and begin a chat, in the place of the one before; it need not reach the verifier for that. */
  async start(wishes: Wishes): Promise<void> {
    await this.close();
    this.place = wishes.place;
    this.device.wantsWriter = wishes.writer;
    this.problem = "";
    this.bundle = null;
    this.changed();
    try {
      this.bundle = await this.device.open(wishes.place.bundle, wishes.anew);
      await this.connect(wishes, this.bundle);
    } catch (error) {
      await this.close();
      const elsewhere = error instanceof StoreError && (await isOpenElsewhere());
      this.problem = elsewhere ? ELSEWHERE : asSentence((error as Error).message);
    }
    this.changed();
  }

  /** Download what drafts and writes; returns whether it is here. It counts from the next start on. */
  async fetchModels(): Promise<boolean> {
    return this.bundle !== null && this.device.fetch(this.place.bundle, this.bundle);
  }

  /** Tell the chat what the page hears of device and network, and what the user wants of it. */
  follow(): void {
    this.unfollow();
    const { chat } = this;
    if (chat === null) return;
    this.unfollow = followPage({
      tellConditions: (heard) => chat.tellConditions({ ...heard, lowPower: heard.lowPower || this.savePower() }),
      networkChanged: () => chat.networkChanged(),
      save: () => chat.save(),
    });
  }

  /** Leave the verifier; what is being written goes on with the next page. */
  async close(): Promise<void> {
    const { chat } = this;
    this.unfollow();
    this.chat = this.talk = null;
    await chat?.close();
    await this.device.close();
  }

  private async connect({ drafting, place, token }: Wishes, bundle: Bundle): Promise<void> {
    const drafters = await this.device.load(place.bundle, bundle);
    const { manifest } = bundle;
    const chat = await Chat.connect(
      bundle,
      { url: place.verifier, token },
      { ...drafters, policy: "ask", settings: { drafting }, ...storeOf(), wait: false },
    );
    this.chat = chat;
    this.follow();
    this.talk = { chat, target: manifest.fingerprints.target, recommended: manifest.sampling };
  }
}

/** Whether another tab has the chat: this page takes no other lock. Some browsers have no locks. */
async function isOpenElsewhere(): Promise<boolean> {
  const { locks } = navigator as { readonly locks?: LockManager };
  return ((await locks?.query())?.held ?? []).length > 0;
}

/** Where an answer under way outlives the page; nowhere without the locks that only secure contexts have. */
function storeOf(): { store?: ChatStore } {
  return isSecureContext ? { store: new IndexedDbChatStore("answer") } : {};
}
