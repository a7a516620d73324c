/** Chats in IndexedDB, which pages have in every context. */

import { holds, StorageError, summaryOf, type Chats, type StoredChat, type Summary } from "./chats.js";
import type { Message } from "./message.js";

const NAME = "moa-edge chats";
const VERSION = 1;
const SUMMARIES = "summaries"; // rows of the list, so that it is read without the chats
const CHATS = "chats";
const DAMAGED = "this chat cannot be read: what is stored of it is damaged, or of another version of this page";

export class ChatDatabase implements Chats {
  private constructor(private readonly database: IDBDatabase) {}

  /** @throws StorageError this browser keeps nothing, as in some private windows. */
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

/** Whether it has the parts of one, as far as the page would stumble over them. */
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
