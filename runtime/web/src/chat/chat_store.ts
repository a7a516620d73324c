/** Where a chat is kept: written whole or not at all, private to its user, and of one program at a time. */

import type { SnapshotJson } from "../session/snapshot.js";

/** One chat's place. `IndexedDbChatStore` is a browser's, `FileChatStore` Node's. */
export interface ChatStore {
  /** What it is called in a sentence, such as a file's path. */
  readonly name: string;

  /**
   * Take it, so that no other program, tab or worker has it until {@link close}.
   *
   * @returns what was written last; undefined where nothing was. What is broken is given as it is.
   * @throws StoreError somebody else has it, or it cannot be read.
   */
  open(): Promise<unknown>;

  /**
   * Put `content` in the place of what was there; kept, whatever becomes of the program, when this is done. One call at a
   * time.
   *
   * @throws StoreError it cannot be written; what was there stays.
   */
  write(content: SnapshotJson): Promise<void>;

  /**
   * Rename what is there, which is of no use here; returns its new name.
   *
   * @throws StoreError it cannot be renamed.
   */
  setAside(): Promise<string>;

  /** Let others have it. */
  close(): Promise<void>;
}
