/** From an address and a token to a chat of the runtime. */

import { Chat, StoreError, type Bundle, type ChatStore, type Drafting } from "@moa-edge/runtime";
import { browserHost, followPage, IndexedDbChatStore } from "@moa-edge/runtime/browser";

import type { Place } from "./access.js";
import type { Talk } from "./conversations.js";
import { Device } from "./device.js";
import { asSentence } from "./strings.js";

const ELSEWHERE = "moa-edge is open in another tab: continue there, or close it there and try again.";

/** What a connection is made with. */
export interface ConnectionOptions {
  readonly place: Place;
  readonly token: string;
  readonly drafting: Drafting;
  /** Whether to download the writer, too. */
  readonly writer: boolean;
  /** Whether to ask the server for a newer bundle than the stored one, for example after it refused that. */
  readonly anew: boolean;
}

/** Open the bundle and a chat of the runtime, one after the other. */
export class Connection {
  readonly device: Device;
  chat: Chat | null = null;
  talk: Talk | null = null;
  bundle: Bundle | null = null;
  /** Why there is no chat, in a sentence; empty if there is one, or will be. */
  problem = "";
  /** Host of the server; empty before the first start. */
  get server(): string {
    return this.place.verifier === "" ? "" : new URL(this.place.verifier).host;
  }

  private unfollow: () => void = () => undefined;
  private place: Place = { verifier: "", bundle: "" };

  /**
   * @param savePower returns whether the user wants the device to run no model.
   * @param changed redraws the page.
   */
  constructor(
    private readonly savePower: () => boolean,
    private readonly changed: () => void,
  ) {
    this.device = new Device(changed);
  }

  /** Open the bundle and begin a chat, in place of the one before. The verifier need not be reachable. */
  async start(options: ConnectionOptions): Promise<void> {
    await this.close();
    this.place = options.place;
    this.device.wantsWriter = options.writer;
    this.problem = "";
    this.bundle = null;
    this.changed();
    try {
      this.bundle = await this.device.open(options.place.bundle, options.anew);
      await this.connect(options, this.bundle);
    } catch (error) {
      await this.close();
      const elsewhere = error instanceof StoreError && (await isOpenElsewhere());
      this.problem = elsewhere ? ELSEWHERE : asSentence((error as Error).message);
    }
    this.changed();
  }

  /** Download the models; return whether they are here. They are used from the next start on. */
  async fetchModels(): Promise<boolean> {
    return this.bundle !== null && this.device.fetch(this.place.bundle, this.bundle);
  }

  /** Tell the chat the conditions of device and network, and of the user's settings. */
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

  /** Disconnect; the next page continues a running answer. */
  async close(): Promise<void> {
    const { chat } = this;
    this.unfollow();
    this.chat = this.talk = null;
    await chat?.close();
    await this.device.close();
  }

  private async connect({ drafting, place, token }: ConnectionOptions, bundle: Bundle): Promise<void> {
    const drafters = await this.device.load(place.bundle, bundle);
    const { manifest } = bundle;
    const chat = await Chat.connect(
      bundle,
      { url: place.verifier, token },
      { ...drafters, host: browserHost(), policy: "ask", overflow: "trim", settings: { drafting }, ...storeOf(), wait: false },
    );
    this.chat = chat;
    this.follow();
    this.talk = { chat, target: manifest.fingerprints.target, recommended: manifest.sampling };
  }
}

/** Return whether another tab has the chat: the page takes no other lock. Some browsers have no locks. */
async function isOpenElsewhere(): Promise<boolean> {
  const { locks } = navigator as { readonly locks?: LockManager };
  return ((await locks?.query())?.held ?? []).length > 0;
}

/** Return the store of a running answer; none without the locks that only secure contexts have. */
function storeOf(): { store?: ChatStore } {
  return isSecureContext ? { store: new IndexedDbChatStore("answer") } : {};
}
