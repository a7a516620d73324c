/** Stored chats, wherever they are kept. */

import type { ChatSettings } from "../settings.js";
import type { Message } from "./message.js";

/** A row of the list of chats. */
export interface Summary {
  readonly id: string;
  readonly title: string;
  /** Milliseconds since 1970. */
  readonly updated: number;
  /** Whether the verifier is still to check an answer. */
  readonly unconfirmed: boolean;
  /** Whether an answer was being written when it was stored. */
  readonly unfinished: boolean;
}

export interface StoredChat {
  readonly id: string;
  title: string;
  updated: number;
  settings: ChatSettings;
  messages: readonly Message[];
}

/** Every call rejects with a StorageError where the device cannot do it. */
export interface Chats {
  /** Latest first; those with these words in title or messages. */
  list(words?: string): Promise<Summary[]>;
  /** Null where there is none. */
  get(id: string): Promise<StoredChat | null>;
  put(chat: StoredChat): Promise<void>;
  remove(id: string): Promise<void>;
}

/** What the device could not store or read, in a sentence. */
export class StorageError extends Error {}

export function summaryOf({ id, title, updated, messages }: StoredChat): Summary {
  return {
    id,
    title,
    updated,
    unconfirmed: messages.some((one) => one.unconfirmed !== null),
    unfinished: messages.some((one) => !one.finished),
  };
}

/** Whether all words are somewhere in a chat, in any case. */
export function holds(chat: StoredChat, words: string): boolean {
  const text = [chat.title, ...chat.messages.map(({ content }) => content)].join("\n").toLowerCase();
  return words
    .toLowerCase()
    .split(/\s+/u)
    .every((word) => text.includes(word));
}

/** A chat that is stored with its first question. */
export function newChat(settings: ChatSettings): StoredChat {
  const id = [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("-");
  return { id, title: "", updated: Date.now(), settings, messages: [] };
}
