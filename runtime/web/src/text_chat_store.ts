/** A chat in a store of texts, such as an app's preferences. */

import { saidBy } from "./backends/base.js";
import type { ChatStore } from "./chat_store.js";
import { StoreError } from "./errors.js";
import type { SnapshotJson } from "./session/snapshot.js";

/** A store of texts that one app has: React Native's AsyncStorage or MMKV, or that of a native program. */
export interface TextStore {
  /** Return the text of a key; null if there is none. */
  get(key: string): Promise<string | null>;

  /** Write a text, wholly or not at all; it is durable when this is done. */
  set(key: string, text: string): Promise<void>;
}

/** One text, as JSON. An app is one program, so that a chat is open twice only by mistake. */
export class TextChatStore implements ChatStore {
  private static readonly open = new Set<string>();
  private opened = false;

  /** @param name of the chat, which is its key. */
  constructor(
    readonly name: string,
    private readonly texts: TextStore,
  ) {}

  async open(): Promise<unknown> {
    if (TextChatStore.open.has(this.name)) throw new StoreError(`the chat ${this.name} is open already: close it first`);
    TextChatStore.open.add(this.name);
    this.opened = true;
    let text: string | null;
    try {
      text = await this.texts.get(this.name);
    } catch (error) {
      await this.close();
      throw new StoreError(`the chat ${this.name} cannot be read: ${saidBy(error)}`);
    }
    if (text === null) return undefined;
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }

  async write(content: SnapshotJson): Promise<void> {
    try {
      await this.texts.set(this.name, JSON.stringify(content));
    } catch (error) {
      throw new StoreError(`the chat ${this.name} cannot be written: ${saidBy(error)}`);
    }
  }

  async setAside(): Promise<string> {
    const aside = `${this.name} set aside ${new Date().toISOString()}`;
    try {
      await this.texts.set(aside, (await this.texts.get(this.name)) ?? "");
    } catch (error) {
      throw new StoreError(`the chat ${this.name} cannot be renamed to ${aside}: ${saidBy(error)}`);
    }
    return aside;
  }

  async close(): Promise<void> {
    if (this.opened) TextChatStore.open.delete(this.name);
    this.opened = false;
  }
}
