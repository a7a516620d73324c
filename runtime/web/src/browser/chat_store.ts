/** A chat in the browser's database: written whole or not at all, private to this origin, and open in one tab at a time. */

import type { ChatStore } from "../chat_store.js";
import { StoreError } from "../errors.js";
import type { SnapshotJson } from "../session/snapshot.js";

const DATABASE = "moa-edge-chats";
const CHATS = "chats";
/** Milliseconds within which a reloading tab unlocks its chat. */
const PATIENCE_MS = 2000;

/** One entry of an IndexedDB, and the Web Lock of the same name, which the browser releases when the tab ends. */
export class IndexedDbChatStore implements ChatStore {
  private database: IDBDatabase | undefined;
  private release: (() => void) | undefined;

  /**
   * @param name of the chat.
   * @param databaseName of the database that it is in.
   */
  constructor(
    readonly name: string,
    private readonly databaseName = DATABASE,
  ) {}

  async open(): Promise<unknown> {
    await this.lock();
    try {
      this.database = await openDatabase(this.databaseName);
      return await this.entry("readonly", (chats) => chats.get(this.name) as IDBRequest<unknown>);
    } catch (error) {
      await this.close();
      throw new StoreError(`the chat ${this.name} cannot be read from this browser's storage: ${sentence(error)}`);
    }
  }

  async write(content: SnapshotJson): Promise<void> {
    try {
      await this.entry("readwrite", (chats) => chats.put(content, this.name));
    } catch (error) {
      throw new StoreError(`the chat ${this.name} cannot be written to this browser's storage: ${sentence(error)}`);
    }
  }

  async setAside(): Promise<string> {
    const aside = `${this.name} set aside ${new Date().toISOString()}`;
    try {
      const content = await this.entry("readonly", (chats) => chats.get(this.name) as IDBRequest<unknown>);
      await this.entry("readwrite", (chats) => {
        chats.put(content, aside);
        return chats.delete(this.name);
      });
    } catch (error) {
      throw new StoreError(`the chat ${this.name} cannot be renamed to ${aside}: ${sentence(error)}`);
    }
    return aside;
  }

  async close(): Promise<void> {
    this.database?.close();
    this.database = undefined;
    this.release?.();
    this.release = undefined;
  }

  /** Delete the stored chat, which must not be open. */
  async delete(): Promise<void> {
    await this.open();
    try {
      await this.entry("readwrite", (chats) => chats.delete(this.name));
    } finally {
      await this.close();
    }
  }

  private async lock(): Promise<void> {
    const { locks } = navigator as { readonly locks?: LockManager };
    if (!locks) {
      const text = "a page can keep a chat only where it was opened by https or on localhost";
      throw new StoreError(`${text}: browsers have no locks else`);
    }
    const signal = AbortSignal.timeout(PATIENCE_MS);
    await new Promise<void>((taken, refused) => {
      const held = locks.request(`${this.databaseName} ${this.name}`, { signal }, () => {
        taken();
        return new Promise<void>((release) => (this.release = release));
      });
      held.catch(() =>
        refused(new StoreError(`the chat ${this.name} is open in another tab: close it there, or begin another chat`)),
      );
    });
  }

  /** Run a transaction on the entry; done when it is on the disk, as far as the browser can tell. */
  private async entry<T>(mode: IDBTransactionMode, ask: (chats: IDBObjectStore) => IDBRequest<T>): Promise<T> {
    const transaction = this.database!.transaction(CHATS, mode, { durability: "strict" });
    const request = ask(transaction.objectStore(CHATS));
    await new Promise<void>((resolve, reject) => {
      transaction.oncomplete = () => resolve();
      transaction.onabort = () => reject(transaction.error ?? new Error("it was given up"));
    });
    return request.result;
  }
}

function openDatabase(name: string): Promise<IDBDatabase> {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(name, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(CHATS);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("it cannot be opened"));
  });
}

/** Return the message of a database's error. */
function sentence(error: unknown): string {
  const { message, name } = error as Error;
  return message || name;
}
