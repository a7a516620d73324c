/** Stored chats, and the browser's database that keeps them. */

import type { Message } from "./message.js";
import type { ChatSettings } from "./settings.js";

/** A row of the list of chats. */
export interface Summary {
  readonly id: string;
  readonly title: string;
  /** Milliseconds since 1970. */
  readonly updated: number;
  /** Whether an answer is still to be checked by the verifier. */
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

/** Stored chats. Every call rejects with a StorageError if the device cannot do it. */
export interface Chats {
  /** Return the chats with these words in title or messages, latest first. */
  list(words?: string): Promise<Summary[]>;
  /** Return a chat; null if there is none. */
  get(id: string): Promise<StoredChat | null>;
  put(chat: StoredChat): Promise<void>;
  remove(id: string): Promise<void>;
}

/** The device could not store or read a chat. */
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

/** Return whether a chat contains all words, in upper or lower case. */
export function holds(chat: StoredChat, words: string): boolean {
  const text = [chat.title, ...chat.messages.map(({ content }) => content)].join("\n").toLowerCase();
  return words
    .toLowerCase()
    .split(/\s+/u)
    .every((word) => text.includes(word));
}

/** Return a new chat. */
export function newChat(settings: ChatSettings): StoredChat {
  const id = [...crypto.getRandomValues(new Uint32Array(4))].map((part) => part.toString(36)).join("-");
  return { id, title: "", updated: Date.now(), settings, messages: [] };
}

const NAME = "moa-edge chats";
const VERSION = 1;
const SUMMARIES = "summaries"; // rows of the list, which is read without the chats
const CHATS = "chats";
const DAMAGED = "this chat cannot be read: what is stored of it is damaged, or of another version of this page";

/** Chats in IndexedDB, which pages have in every context. */
export class ChatDatabase implements Chats {
  private constructor(private readonly database: IDBDatabase) {}

  /**
   * Open the database.
   *
   * @throws StorageError this browser stores nothing, for example in a private window.
   */
  static async open(): Promise<ChatDatabase> {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(SUMMARIES, { keyPath: "id" });
      request.result.createObjectStore(CHATS, { keyPath: "id" });
    };
    const database = await done(request, "open its stored chats");
    database.onversionchange = () => database.close(); // a newer page wants to change it
    return new ChatDatabase(database);
  }

  async list(words = ""): Promise<Summary[]> {
    const name = words.trim() === "" ? SUMMARIES : CHATS;
    const all = (await done(this.store("readonly", name).getAll(), "read its stored chats")) as unknown[];
    const found =
      name === SUMMARIES
        ? (all as Summary[])
        : all.filter(isChat).filter((chat) => holds(chat, words.trim())).map(summaryOf);
    return found.sort((a, b) => b.updated - a.updated);
  }

  async get(id: string): Promise<StoredChat | null> {
    const found: unknown = await done(this.store("readonly", CHATS).get(id), "read a stored chat");
    if (found !== undefined && !isChat(found)) throw new StorageError(DAMAGED);
    return found ?? null;
  }

  async put(chat: StoredChat): Promise<void> {
    await this.both((summaries, chats) => {
      summaries.put(summaryOf(chat));
      chats.put({ ...chat });
    }, "store the chat");
  }

  async remove(id: string): Promise<void> {
    await this.both((summaries, chats) => {
      summaries.delete(id);
      chats.delete(id);
    }, "delete the chat");
  }

  private store(mode: IDBTransactionMode, name: string): IDBObjectStore {
    return this.database.transaction(name, mode).objectStore(name);
  }

  private both(change: (summaries: IDBObjectStore, chats: IDBObjectStore) => void, what: string): Promise<void> {
    return new Promise((resolve, reject) => {
      const fail = (error: unknown): void => reject(problem(what, error));
      try {
        const transaction = this.database.transaction([SUMMARIES, CHATS], "readwrite");
        transaction.oncomplete = () => resolve();
        transaction.onabort = () => fail(transaction.error);
        change(transaction.objectStore(SUMMARIES), transaction.objectStore(CHATS));
      } catch (error) {
        fail(error);
      }
    });
  }
}

/** Return whether a stored value has the parts of a chat that the page needs. */
function isChat(found: unknown): found is StoredChat {
  const { messages, settings, title } = found as Partial<StoredChat>;
  const read = Array.isArray(messages) && messages.every((one: unknown) => typeof (one as Message | null)?.content === "string");
  return read && typeof title === "string" && typeof settings === "object" && settings !== null;
}

function done<T>(request: IDBRequest<T>, what: string): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(problem(what, request.error));
  });
}

function problem(what: string, error: unknown): StorageError {
  const full = error instanceof DOMException && error.name === "QuotaExceededError";
  const why = full ? "its storage is full: delete chats, or free space on the device" : "reload the page to try again";
  return new StorageError(`this browser could not ${what}; ${why}`);
}
