/** When a chat is stored: what must not be lost at once, the rest about once a second. */

import { MoaError, StoreError } from "../errors.js";
import type { Host } from "../link/host.js";
import type { SnapshotJson } from "../session/snapshot.js";
import type { ChatStore } from "./chat_store.js";

const SECONDS_BETWEEN = 1;

/** The next write. */
interface Write {
  readonly done: Promise<void>;
  readonly end: () => void;
}

/**
 * Writes a chat's state into its {@link ChatStore}. Without one it does nothing.
 *
 * One write is under way at a time. All who want one meanwhile share the next, which takes the state as it is then.
 */
export class ChatKeeper {
  private store: ChatStore | undefined;
  private wanted: Write | undefined;
  private writing: Promise<void> | undefined;
  private stopTimer: (() => void) | undefined;
  private notRestored = "";
  private notWritten = "";

  /**
   * @param state the chat as it is now; called between two things that happen to the chat, and not changed by what happens
   *   later.
   */
  constructor(
    private readonly state: () => SnapshotJson,
    private readonly host: Host,
  ) {}

  /** Whether there is a store. */
  get keeps(): boolean {
    return this.store !== undefined;
  }

  /** Why the chat is not stored, or why the one that was there did not go on; empty where all is well. */
  get problem(): string {
    return this.notWritten || this.notRestored;
  }

  /**
   * Keep the chat there.
   *
   * @param restore makes something of what is there.
   * @returns what it made; undefined where nothing is there, or nothing of use: that is set aside then.
   * @throws StoreError somebody else has it, or it can be neither used nor set aside; or there is a store.
   */
  async open<T>(store: ChatStore, restore: (content: unknown) => T): Promise<T | undefined> {
    if (this.store) throw new StoreError(`the chat is kept in ${this.store.name} already`);
    const content = await store.open();
    let restored: T | undefined;
    try {
      restored = content === undefined ? undefined : restore(content);
    } catch (error) {
      try {
        if (!(error instanceof MoaError)) throw error;
        this.notRestored = `${error.message}; what was stored is now ${await store.setAside()}`;
      } catch (failure) {
        await store.close();
        throw failure;
      }
    }
    this.store = store;
    return restored;
  }

  /** Something changed that can be lost: it is written soon. */
  touch(): void {
    if (!this.store || this.stopTimer || this.wanted) return;
    this.stopTimer = this.host.later(SECONDS_BETWEEN, () => void this.save());
  }

  /** Write what is; done when that is kept, or could not be written. */
  async save(): Promise<void> {
    this.stopTimer?.();
    this.stopTimer = undefined;
    if (!this.store) return;
    if (!this.wanted) {
      this.wanted = newWrite();
      this.writing ??= this.write(this.store);
    }
    await this.wanted.done;
  }

  /** Write what is, and let others have the place. */
  async close(): Promise<void> {
    await this.save();
    await this.writing;
    const { store } = this;
    this.store = undefined;
    await store?.close();
  }

  private async write(store: ChatStore): Promise<void> {
    await undefined; // the thing that happens is over then
    try {
      while (this.wanted) {
        const { end } = this.wanted;
        this.wanted = undefined;
        await this.writeOnce(store).finally(end);
      }
    } finally {
      this.writing = undefined;
    }
  }

  private async writeOnce(store: ChatStore): Promise<void> {
    try {
      await store.write(this.state());
      this.notWritten = "";
    } catch (error) {
      // A defect, too: all who want the next write would wait for ever.
      this.notWritten = error instanceof StoreError ? error.message : `storing it failed unexpectedly: ${String(error)}`;
    }
  }
}

function newWrite(): Write {
  let end = (): void => undefined;
  const done = new Promise<void>((resolve) => (end = resolve));
  return { done, end };
}
